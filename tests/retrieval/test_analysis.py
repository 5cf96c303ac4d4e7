"""Texts to terms: one answer for one text, in every script and thread."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ragspec.retrieval.search.analysis import RULES, Analyzer, rules_of
from ragspec.retrieval_config import AnalyzerConfig, Language

ENGLISH = Analyzer(AnalyzerConfig(language="english"))
AUTO = Analyzer(AnalyzerConfig())
WORDS: dict[str, Any] = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
TEXTS = ["It was raining, and the ships came in.", "雨が降る港", "Der Hafen — naïve Über‑Schiffe", "검색 엔진"]


def overlap(query: str, text: str, analyzer: Analyzer = ENGLISH) -> set[str]:
    return set(analyzer.terms(query)) & set(analyzer.terms(text))


def test_word_forms_share_a_term() -> None:
    """Without stems, "raining" finds nothing about rain."""
    assert ENGLISH.terms("Rain raining RAINED rains") == ["rain"] * 4
    plain = Analyzer(AnalyzerConfig(language="none"))
    assert plain.terms("Raining ships") == ["raining", "ships"]


@pytest.mark.parametrize(("query", "text"), WORDS["without spaces"])
def test_text_without_spaces_is_found_by_its_parts(query: str, text: str) -> None:
    """A sentence of Chinese or Thai as one term is found only by the whole sentence."""
    assert overlap(query, text)
    assert not overlap(query, "The harbour was empty.")


def test_scripts_are_split_side_by_side() -> None:
    """A run that swallows its neighbours loses the product name in a Japanese sentence, or counts words twice."""
    assert ENGLISH.terms("Linux用の設定") == ["linux", "用の", "の設", "設定", "用", "設", "定"]
    assert ENGLISH.terms("雨。雪") == ["雨", "雪"]
    assert ENGLISH.terms("。、・「」 ฿") == []


def test_marks_do_not_split_words() -> None:
    """Decomposed letters, as file systems write them, and Indian vowel signs are no word borders."""
    assert ENGLISH.terms("cafe\u0301") == ENGLISH.terms("café") == ENGLISH.terms("cafe")
    assert ENGLISH.terms("ＡＢＣ ﬁre") == ["abc", "fire"]
    assert len(ENGLISH.terms("हिन्दी")) == 1


@pytest.mark.parametrize(("written", "plain"), WORDS["invisible characters"])
@pytest.mark.parametrize("config", [ENGLISH.config, AUTO.config, AnalyzerConfig(language="none")])
def test_invisible_characters_and_the_dotted_i_change_no_word(written: str, plain: str, config: AnalyzerConfig) -> None:
    """A word that a browser hyphenated is two other words; İ in lower case is an i with a second dot."""
    assert Analyzer(config).terms(written) == Analyzer(config).terms(plain)
    assert Analyzer(config, rules=1).terms(written) != Analyzer(config, rules=1).terms(plain)


def test_an_id_names_the_rules_of_its_index() -> None:
    """An index of earlier rules must be read by them; one of later rules must not be read at all."""
    ids = [Analyzer(ENGLISH.config, rules).id for rules in (1, 2, RULES)]
    assert ids[:2] == ["english/1/42e39f45614a", "english/2/42e39f45614a"] and [rules_of(each) for each in ids] == [
        1,
        2,
        RULES,
    ]
    assert ids[2] == ENGLISH.id and rules_of(f"english/{RULES + 1}/42e39f45614a") == rules_of("?") == RULES


def test_the_common_words_are_those_of_the_texts_language() -> None:
    """ "die" weighed nothing in an English question; or an index of earlier rules whose scores change."""
    question = "Was macht die Mühle in der Nacht?"
    english, german = (AUTO.common_terms(text) for text in ("What does it do?", question))
    assert {"what", "doe", "it"} <= english == ENGLISH.common_terms(question) and "die" in german - english
    assert Analyzer(AUTO.config, rules=3).common_terms(question) == frozenset()


def test_accents_are_folded_only_where_they_are_often_left_out() -> None:
    """Swedish "får" (sheep) is not "far" (father)."""
    assert ENGLISH.terms("creme brulee") == ENGLISH.terms("crème brûlée")
    assert not overlap("får", "far", Analyzer(AnalyzerConfig(language="swedish")))


def test_stop_words_are_left_out_only_when_asked() -> None:
    """ "To be or not to be" must stay findable by default."""
    assert len(ENGLISH.terms("to be or not to be")) == 6
    for language in ("english", "auto"):
        chosen = Analyzer(AnalyzerConfig(language=language, stop_words=True))  # type: ignore[arg-type]
        assert chosen.terms("to be or not to be, the ship of los muchachos") == ["ship", "los", "muchacho"]


@pytest.mark.parametrize("language", get_args(Language))
def test_every_language_on_offer_works(language: Language) -> None:
    """A language without a stemmer or stop words in the library would fail at the first document, not when configured."""
    assert Analyzer(AnalyzerConfig(language=language)).terms("naïve 2024")[-1] == "2024"
    try:
        config = AnalyzerConfig(language=language, stop_words=True)
    except ValidationError as error:
        assert "no stop words" in str(error)
    else:
        Analyzer(config)


def test_unknown_settings_are_refused() -> None:
    """A misspelt language that falls back to no stemming finds half as much and says nothing."""
    for wrong in ({"language": "klingon"}, {"stopwords": True}):
        with pytest.raises(ValidationError):
            AnalyzerConfig.model_validate(wrong)


def test_ids_differ_where_terms_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index searched with other terms than it was built with finds nothing, silently."""
    configs = [ENGLISH.config, AnalyzerConfig(), AnalyzerConfig(language="none"), AnalyzerConfig(stop_words=True)]
    ids = [Analyzer(config).id for config in configs]
    assert len(set(ids)) == 4 and ids[0] == ENGLISH.id
    terms = Analyzer.terms
    monkeypatch.setattr(Analyzer, "terms", lambda self, text: [t.replace("poni", "pony") for t in terms(self, text)])
    assert Analyzer(AnalyzerConfig()).id not in ids  # as after an update of the library


@pytest.mark.parametrize(("query", "text", "stem"), WORDS["word forms"])
def test_word_forms_of_other_languages_share_a_term(query: str, text: str, stem: str) -> None:
    """With English stems alone "Haus" does not find "Häuser"."""
    assert stem in overlap(query, text, AUTO) - overlap(query, text)


FOREIGN = [
    "Die Häuser der Stadt sind alt.",
    "Les chevaux ont mangé.",
    "книги читались детьми",
    "The mills stand still.",
    "雨天",
]


@given(st.lists(st.sampled_from(FOREIGN) | st.text(st.characters(codec="utf-8"), max_size=20)))
def test_every_text_is_found_as_without_detection(texts: list[str]) -> None:
    """A German sentence in an English text, or a query of one word, whose language is told wrongly, so that it finds nothing."""
    mixed = " ".join(texts)
    assert set(ENGLISH.terms(mixed)) <= set(AUTO.terms(mixed))


@pytest.mark.parametrize("text", WORDS["English"])
def test_english_texts_keep_their_terms(text: str) -> None:
    """Names and code that are taken for Spanish change the lengths of passages, and so every score of an English index."""
    assert AUTO.terms(text) == ENGLISH.terms(text)


@given(st.text(st.characters(codec="utf-8")))
def test_any_text_has_terms_that_stay_the_same(text: str) -> None:
    """A term that is empty or longer than a limit, or a crash at an odd character, stops a whole build."""
    terms = ENGLISH.terms(text)
    assert terms == Analyzer(ENGLISH.config).terms(text)
    assert all(0 < len(term.encode()) <= 400 for term in terms)
    if text.isascii():
        assert [*terms, "e"] == ENGLISH.terms(f"{text} é")


def test_threads_may_share_an_analyzer() -> None:
    """The library's analyzer is one buffer, borrowed while it works: a second borrower would get an error or its words."""
    texts = [f"{text} {number} " * 200 for number in range(8) for text in TEXTS]
    expected = [ENGLISH.terms(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(ENGLISH.terms, texts)) == expected


def test_a_number_with_dots_is_a_term_beside_its_parts() -> None:
    """Who asked about version 8.1.0 was shown others with a 0 and a 1; an index of earlier rules must not be asked for it."""
    text = "Version v8.1.0 (of 2025) needs 10.2."
    parts = ["version", "v8", "1", "0", "of", "2025", "need", "10", "2"]
    assert ENGLISH.terms(text) == [*parts, "8.1.0", "10.2"]
    assert Analyzer(ENGLISH.config, rules=2).terms(text) == parts
    assert ENGLISH.terms("1.2.3.") == ["1", "2", "3", "1.2.3"] and ENGLISH.terms("..1 2..") == ["1", "2"]
