"""vLLM with random weights, and so tokens, of its own: its engine in this process, one step at a time."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.peers.packages import require
from scripts.peers.sizes import CONTEXT, NUM_PROMPT_TOKENS

PACKAGES = ("vllm",)


def require_vllm() -> Any:
    """The package. Raises MissingPackage."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no messages to another process
    return require("vllm", package="vllm", hint="install a vllm for this torch and CUDA")


class Vllm:
    """A model with up to `num_rows` rows, by transformers' `config.json` in a folder. Raises MissingPackage."""

    def __init__(self, folder: Path, *, num_rows: int, dtype: str) -> None:
        vllm = require_vllm()
        self._sampling = vllm.SamplingParams(temperature=0.0, max_tokens=CONTEXT, ignore_eos=True, detokenize=False)
        self._engine = vllm.LLM(
            model=str(folder),
            dtype=dtype,
            load_format="dummy",
            skip_tokenizer_init=True,
            gpu_memory_utilization=0.5,  # of all memory: other processes have some
            enable_prefix_caching=False,  # the same prompts are computed again
            max_model_len=CONTEXT,
            max_num_seqs=num_rows,
            max_num_batched_tokens=max(num_rows * NUM_PROMPT_TOKENS, CONTEXT),  # a prefill is one step
        ).llm_engine
        self._names = map(str, itertools.count())
        self._tokens: dict[str, list[int]] = {}  # of each row so far

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        if self._tokens:
            self._engine.abort_request(list(self._tokens))
        self._tokens, self._prompt = {next(self._names): [] for _ in prompts}, prompts[0]
        for name, prompt in zip(self._tokens, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, self._sampling)
        return self._run()

    def spread(self, num_rows: int) -> None:
        self.prefill([self._prompt] * num_rows)

    def step(self, token_ids: Sequence[int], position: int) -> list[int]:
        return self._run()

    def _run(self) -> list[int]:
        """Step until every row has a further token, which some versions return a step late; returns these tokens."""
        wanted = 1 + min(map(len, self._tokens.values()))
        while min(map(len, self._tokens.values())) < wanted:
            if not self._engine.has_unfinished_requests():
                raise RuntimeError(f"vLLM has ended all rows before token {wanted}")
            for output in self._engine.step():
                if output.request_id in self._tokens:
                    self._tokens[output.request_id] = list(output.outputs[0].token_ids)
        return [tokens[wanted - 1] for tokens in self._tokens.values()]
