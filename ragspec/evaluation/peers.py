"""transformers' own generation on the same weights: greedy decoding and prompt lookup, timed from token to token.

Stock linear layers and scaled-dot-product attention; nothing of ragspec's numerics takes part.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from ragspec.config import TargetConfig
from ragspec.engine.checkpoints.target_files import target_folder
from ragspec.engine.engine import Engine
from ragspec.evaluation.cases import Case
from ragspec.evaluation.overrides import ForcedAnswers
from ragspec.evaluation.timing import TimedGeneration
from ragspec.numerics.threads import num_processors, run_in_thread, set_num_threads

LOOKUP_TOKENS = 10


def load_peer(config: TargetConfig) -> Any:
    """The target's weights as transformers runs them."""
    dtype = getattr(torch, config.dtype)
    options = {"dtype": dtype, "attn_implementation": "sdpa"}
    return run_in_thread(
        lambda: AutoModelForCausalLM.from_pretrained(target_folder(config), **options).eval(), num_processors()
    )


class TransformersDecoder:
    """Greedy `generate` with `options` such as `prompt_lookup_num_tokens=10`; forced cases decode their answers.
    Without `ends`, the end of text does not stop decoding.

    Decoding runs in the engine's thread, with the same OpenMP workers as the engine.
    """

    def __init__(
        self, model: Any, engine: Engine, forced: ForcedAnswers | None = None, *, ends: bool = True, **options: Any
    ) -> None:
        self._model = model
        self._engine = engine
        self._eos_ids = list(engine.target.eos_ids) if ends else []
        self._forced = forced or ForcedAnswers()
        self._options = options

    def __call__(self, case: Case) -> TimedGeneration:
        runs: list[TimedGeneration] = []
        self._engine.between_steps(lambda: runs.append(self._decode(case)))
        return runs[0]

    def _decode(self, case: Case) -> TimedGeneration:
        clock, given = _Clock(), self._forced.get(case.id)
        processors = [] if given is None else [_Force(given, len(case.prompt_ids))]
        prompt = torch.tensor([case.prompt_ids])
        set_num_threads(num_processors())
        begin = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=case.max_tokens,
                do_sample=False,
                streamer=clock,
                eos_token_id=self._eos_ids or None,
                pad_token_id=0,
                logits_processor=LogitsProcessorList(processors),
                **self._options,
            )
        first_s = clock.times_s[1]  # [0] is the prompt
        token_ids = tuple(output[0, prompt.shape[1] :].tolist())
        return TimedGeneration(token_ids, first_s - begin, clock.times_s[-1] - first_s, len(clock.times_s) - 1)


class _Clock(BaseStreamer):
    """Notes the time of each put: the prompt first, then each token."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: Any) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        pass


class _Force(LogitsProcessor):
    """Allows only the given token at each position.

    Prompt lookup calls processors with made-up logits of ones to learn forbidden tokens. These logits pass
    unchanged: otherwise prompt lookup would learn the future.
    """

    def __init__(self, token_ids: tuple[int, ...], num_prompt: int) -> None:
        self._token_ids = token_ids
        self._num_prompt = num_prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if bool((scores == 1.0).all()):
            return scores
        index = min(input_ids.shape[1] - self._num_prompt, len(self._token_ids) - 1)
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._token_ids[index]] = 0.0
        return forced
