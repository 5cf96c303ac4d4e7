"""The border: the error tree, sampling parameters, texts and settings refuse what is wrong, each with its own error."""

import copy
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec import errors
from ragspec.config import PipelineConfig, load_config, settings_of
from ragspec.core import SamplingParams, check_text
from ragspec.errors import ConfigError, InputError, PromptTooLong, RagspecError
from ragspec.retrieval.search.filters import parse_filter
from ragspec.sampling_params import MAX_SEED

# Errors


def drawn_tree(drawing: str) -> dict[str, str]:
    """Class -> parent, read from a drawing whose levels are four columns wide."""
    root, *lines = drawing[drawing.index("RagspecError") :].splitlines()
    indent = drawing.split("RagspecError")[0].rpartition("\n")[2]
    path, parents = [root], {root: "Exception"}
    for line in lines:
        branch, glyph, rest = line.removeprefix(indent).partition("── ")
        if glyph:
            name = rest.split()[0]
            path[len(branch) // 4 + 1 :] = [name]
            parents[name] = path[-2]
    return parents


def test_the_drawing_of_the_error_tree_is_the_tree() -> None:
    """The drawing users read goes stale when a class is added, moved or renamed."""
    classes = {
        name: member.__base__.__name__
        for name, member in inspect.getmembers(errors, inspect.isclass)
        if member.__module__ == errors.__name__
    }
    assert drawn_tree(inspect.getdoc(errors) or "") == classes
    assert all(issubclass(getattr(errors, name), RagspecError) for name in classes)


def test_every_error_says_what_it_is_for() -> None:
    """An error without a docstring leaves its reader guessing."""
    assert all(member.__doc__ for _, member in inspect.getmembers(errors, inspect.isclass))


def test_a_prompt_that_is_too_long_names_both_numbers() -> None:
    """The user cannot shorten a prompt by an unknown amount."""
    error = PromptTooLong(5000, 2048)
    assert "5000" in str(error) and "2048" in str(error)
    assert (error.num_prompt_tokens, error.max_prompt_tokens) == (5000, 2048)
    assert "max_tokens" not in str(error)
    assert "4000 (max_tokens)" in str(PromptTooLong(40, 0, 4000)), "the output's length is what does not fit"


@pytest.mark.parametrize("error", [ConfigError("x"), PromptTooLong(5000, 2048)], ids=repr)
def test_an_error_survives_the_way_between_two_processes(error: RagspecError) -> None:
    """Ray rebuilds an actor's exception from its arguments; one that cannot be rebuilt arrives as something else."""
    again = copy.copy(error)
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


# Sampling parameters

WRONG_VALUES: dict[str, tuple[Any, ...]] = {
    "seed": (1.5, "1", True, -1, MAX_SEED + 1),
    "max_tokens": (-1, 0, True, 2.0, "8", None),
    "min_tokens": (-1, 129),
    "temperature": (-0.1, math.nan, math.inf, True, "hot"),
    "top_p": (0.0, 1.1, math.nan),
    "top_k": (-1, 1.5),
    "min_p": (-0.1, 1.1),
    "repetition_penalty": (0.0, -1.0),
    "presence_penalty": (math.nan,),
    "frequency_penalty": (math.inf,),
    "n": (0, 65, 1.0, True),
    "logprobs": (-1, 21, True),
    "stop": ("end", ("",), ("end", 3), None, 5),
    "logit_bias": (None, {1: math.nan}, {1: math.inf}, {"1": 1.0}),
    "first_token_bias": (None, {1: math.nan}, {1: 101}, {"1": 1.0}),
    "prefix_bias": ({"1": {1: 1.0}}, {(1,): {1: 101}}, {(1,): None}),
    "ignore_eos": ("no",),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_sampling_parameters_are_refused_by_name(name: str) -> None:
    """A wrong value that is let in fails deep in the engine, or silently changes the text."""
    for value in WRONG_VALUES[name]:
        with pytest.raises(InputError, match=name):
            SamplingParams(**{name: value})


@given(
    seed=st.none() | st.integers(0, MAX_SEED),
    max_tokens=st.integers(1, 2**31),
    temperature=st.floats(0.0, 100.0) | st.integers(0, 100),
    top_p=st.floats(1e-9, 1.0),
    n=st.integers(1, 64),
    logprobs=st.none() | st.integers(0, 20),
)
def test_every_value_in_range_is_taken_as_it_is(**params: Any) -> None:
    """A check that is stricter than its documentation."""
    built = SamplingParams(**params)
    assert all(getattr(built, name) == value for name, value in params.items())


def test_temperature_zero_is_greedy() -> None:
    """A default that samples would not repeat itself."""
    assert SamplingParams().greedy and not SamplingParams(temperature=0.5).greedy


# Texts


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "question is empty"),
        (" \n\t", "question is empty"),
        ("a\0b", "question holds a NUL"),
        ("ab\ud800", "question holds a lone surrogate at character 2"),
        (None, "question must be a string, not NoneType"),
        (b"abc", "question must be a string, not bytes"),
        (["abc"], "question must be a string, not list"),
    ],
    ids=repr,
)
def test_a_text_no_tokenizer_should_see_is_refused(text: Any, reason: str) -> None:
    """A tokenizer fails on these without saying which text it was."""
    with pytest.raises(InputError, match=reason):
        check_text(text, "question")


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(str.strip))
def test_any_other_text_comes_back_unchanged(text: str) -> None:
    """A check that edits the text shifts every citation."""
    assert check_text(text, "question") == text


# Settings


def written(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_nothing_given_gives_the_defaults(tmp_path: Path) -> None:
    """An empty file is not an error, and no file is needed."""
    assert load_config() == load_config(written(tmp_path, "")) == PipelineConfig()


def test_a_file_is_read_and_an_override_wins(tmp_path: Path) -> None:
    """The command line's option was overruled by the file."""
    path = written(tmp_path, "retriever: {num_passages: 5}\ngeneration: {seed: 7, max_tokens: 12}\n")
    config = load_config(path, **{"retriever.num_passages": 2, "generation.max_tokens": None})
    assert (config.retriever.num_passages, config.generation.seed, config.generation.max_tokens) == (2, 7, 12)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("targte: {}", "targte"),
        ("target: {modle: x}", r"target\.modle"),
        ("target: {dtype: float16}", r"target\.dtype"),
        ("retriever: {num_passages: 0}", r"retriever\.num_passages"),
        ("retriever: {num_passages: many}", r"retriever\.num_passages"),
        ("generation: {temperature: .nan}", r"generation\.temperature"),
        ("target: x", "target"),
        ("- a\n- b", "not a mapping"),
        ("a: [", "cannot read"),
        ("a: !!python/object:os.system {}", "cannot read"),
        ("a: 2024-99-99", "cannot read"),
        ("[]", "not a mapping"),
        ("retriever: {num_passages: true}", "num_passages"),
        ("generation: {seed: -5}", "seed"),
    ],
    ids=repr,
)
def test_a_wrong_file_is_refused_with_the_key(tmp_path: Path, text: str, reason: str) -> None:
    """A misspelt key that is ignored runs hours with the wrong setting."""
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("key", ["targte", "target.modle", "modle.target.x"])
def test_an_unknown_override_is_refused_with_the_key(key: str) -> None:
    """The same for an option of the command line."""
    with pytest.raises(ConfigError, match=key.split(".")[0]):
        load_config(**{key: "x"})


@pytest.mark.parametrize("text", ["target: x", "target:", "target: [x]"])
def test_an_override_inside_what_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    """The command line ended in a traceback."""
    with pytest.raises(ConfigError, match="target"):
        load_config(written(tmp_path, text), **{"target.model": "x"})


def test_a_missing_or_unreadable_file_is_refused_with_its_name(tmp_path: Path) -> None:
    """A misspelt path must not mean the defaults."""
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_config(tmp_path / "absent.yaml")
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yaml"):
        load_config(path)


def test_settings_do_not_change_once_built() -> None:
    """A part that edits shared settings changes every other part."""
    with pytest.raises(ValueError, match="frozen"):
        PipelineConfig().target.model = "x"  # type: ignore[misc]


def test_misspelt_settings_and_filter_types_name_the_nearest(tmp_path: Path) -> None:
    """A list of all that is wrong, and a reader who looks up the right word in another file."""
    with pytest.raises(ConfigError, match=r"retriever\.num_pasages: .*; did you mean 'num_passages'\?"):
        load_config(**{"retriever.num_pasages": 3})
    with pytest.raises(ConfigError, match=r"drafting\.eagle\.widnow: .*did you mean 'window'"):
        load_config(**{"drafting.eagle.widnow": 3})
    with pytest.raises(ConfigError, match=r"drafting\.eagle_heads\.mine\.widnow: "):
        load_config(**{"drafting.eagle_heads": {"mine": {"widnow": 3}}})
    with pytest.raises(InputError, match="did you mean 'not'"):
        parse_filter({"type": "nott", "filter": {"type": "eq", "key": "a", "value": 1}})
    path = tmp_path / "file.yaml"
    path.write_text("generation: {max_tokens: 7}\n")
    assert settings_of(str(path)) == settings_of(path) == load_config(path)
    assert settings_of(None) == PipelineConfig()
