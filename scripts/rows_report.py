"""Compares a cache of whole contexts with one in blocks, in turn. Prints tables in Markdown.

Usage: python -m scripts.rows_report [--size 160M] [--rows N] [--context N] [--requests N] [--rounds N]

The cache in blocks is the least one that the memory plan allows for the rows. A step is measured with all rows at the
length of captions, and with as many rows as fit at the end of the context, with random keys and values. The job has
captions, and prompts as long as those with picture tokens; there, the whole contexts are as many as fit into the bytes
of the blocks. Both caches must give equal ids.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from llama_adapter.app.models.random_model import decoder_config, parse_size
from llama_adapter.llm.config import DecoderConfig, EngineConfig
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.load import PlacedDecoder, place_decoder
from llama_adapter.llm.memory_plan import least_cache, plan_memory
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.runners.eager import EagerRunner
from llama_adapter.llm.runners.kernels import KernelRunner
from llama_adapter.runtime.devices import open_backend
from llama_adapter.runtime.schemes import OperatorChoice
from scripts.common import in_turn, parser_of

CAPTION = 88  # positions: a prompt of 56 tokens and half a caption
_PROMPTS, _ANSWERS = (56, 56, 56, 600), (4, 32)  # tokens of the job: three captions, then a prompt with a picture
_NUM_STEPS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is measured."""

    size: str = "160M"
    rows: int = 16
    context: int = 4096
    requests: int = 24
    rounds: int = 3


def main(arguments: Sequence[str] | None = None) -> None:
    settings = _parse(arguments)
    sizes = replace(decoder_config(parse_size(settings.size), context=settings.context), num_adapter_layers=0)
    torch.manual_seed(0)
    state = LlamaAdapterDecoder(sizes).state_dict()
    print("| operators | step | whole, ms | blocks, ms | blocks : whole | whole, MB | blocks, MB |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    kinds: tuple[OperatorChoice, ...] = ("auto", "aten")
    for operators in kinds:
        placed = _placed(sizes, state, operators=operators)
        for name, rows, length in _lengths(settings, placed.config):
            print(_step_row(placed, f"{rows} rows of {name}", settings, rows=rows, length=length))
    print("\n| job | whole, s | blocks, s | blocks : whole | whole, rows | blocks, rows | put back |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    print(_job_row(_placed(sizes, state, operators="auto"), settings))


def _placed(sizes: DecoderConfig, state: dict[str, torch.Tensor], *, operators: OperatorChoice) -> PlacedDecoder:
    config = EngineConfig(decoder=sizes, dtype=torch.float32, operators=operators)
    return place_decoder(config, state.items(), backend=open_backend("cpu"))


def _lengths(settings: Settings, config: EngineConfig) -> list[tuple[str, int, int]]:
    """What a step is measured with: a name, the number of rows, and their length."""
    blocks = least_cache(replace(config, num_slots=settings.rows))
    longest = max(1, blocks.spare_blocks // max(1, blocks.most_blocks - 1))
    captions = "captions", settings.rows, min(CAPTION, settings.context)
    return [captions, (f"{settings.context:,} tokens", min(settings.rows, longest), settings.context)]


def _step_row(placed: PlacedDecoder, name: str, settings: Settings, *, rows: int, length: int) -> str:
    config = replace(placed.config, num_slots=settings.rows)
    runners = {"whole": _open(placed, config), "blocks": _open(placed, least_cache(config))}
    results: dict[str, torch.Tensor] = {}
    ways: dict[str, Callable[[], object]] = {}
    for way, runner in runners.items():
        draw = torch.Generator().manual_seed(0)
        runner._cache.hold([length] * rows)
        shape = runner._cache.read(0, num_places=length)[0].shape
        for slot in range(rows):
            k, v = (torch.randn(shape, generator=draw) for _ in range(2))
            runner._cache.write(slot, (k.numpy(), v.numpy()) if isinstance(runner, KernelRunner) else (k, v))
        ways[way] = lambda runner=runner: runner.decode([5] * rows, [length - 1] * rows)  # type: ignore[misc]
        results[way] = torch.as_tensor(runner.decode([5] * rows, [length - 1] * rows).best_R)
    assert torch.equal(results["whole"], results["blocks"]), "the caches give different tokens"

    def timed(way: str) -> float:
        started = time.perf_counter()
        for _ in range(_NUM_STEPS):
            ways[way]()
        return (time.perf_counter() - started) / _NUM_STEPS * 1e3

    ms, ratio = _in_turn(ways, timed, rounds=settings.rounds)
    sizes = [f"{plan_memory(runner.config, weights=0).slots / 1e6:,.0f}" for runner in runners.values()]
    operators = runners["whole"].operators_name
    return f"| {operators} | {name} | {ms['whole']:.2f} | {ms['blocks']:.2f} | {ratio:.3f} | {' | '.join(sizes)} |"


def _open(placed: PlacedDecoder, config: EngineConfig) -> EagerRunner | KernelRunner:
    runner = placed.runner(config.num_slots, block=config.block, spare_blocks=config.spare_blocks)
    assert isinstance(runner, EagerRunner | KernelRunner), "so are all on the CPU"
    return runner


def _job_row(placed: PlacedDecoder, settings: Settings) -> str:
    blocks = least_cache(replace(placed.config, num_slots=settings.rows))
    whole = replace(placed.config, num_slots=max(1, blocks.num_places // settings.context))
    engines = {way: Engine(_open(placed, config), eos_id=-1) for way, config in (("whole", whole), ("blocks", blocks))}
    answers: dict[str, dict[int, list[int]]] = {}

    def timed(way: str) -> float:
        engine, found = engines[way], dict[int, list[int]]()
        for request in _requests(engine, settings):
            engine.submit(request)
        started = time.perf_counter()
        while engine.num_unfinished:
            for output in engine.step():
                if output.token_id is not None:
                    found.setdefault(output.request_id, []).append(output.token_id)
        answers[way] = found
        return time.perf_counter() - started

    seconds, ratio = _in_turn(engines, timed, rounds=settings.rounds)
    assert len(answers["whole"]) == settings.requests
    assert answers["whole"] == answers["blocks"], "the caches give different ids"
    put_back = engines["blocks"].num_put_back // settings.rounds
    return (
        f"| {settings.requests} requests | {seconds['whole']:.1f} | {seconds['blocks']:.1f} | {ratio:.3f} | "
        f"{whole.num_slots} | {blocks.num_slots} | {put_back} |"
    )


def _in_turn(ways: Iterable[str], timed: Callable[[str], float], *, rounds: int) -> tuple[dict[str, float], float]:
    """The median time of each way, and the median of the ratios of blocks to whole contexts in one round."""
    found = in_turn(ways, timed, rounds=rounds)
    ratios = [blocks / whole for whole, blocks in zip(found["whole"], found["blocks"], strict=True)]
    return {way: statistics.median(times) for way, times in found.items()}, statistics.median(ratios)


def _requests(engine: Engine, settings: Settings) -> list[GenerateRequest]:
    draw, prefix = random.Random(0), engine.empty_prefix()
    requests = []
    for number in range(settings.requests):
        length = min(_PROMPTS[number % len(_PROMPTS)], settings.context - _ANSWERS[1])
        ids = tuple(draw.randrange(3, 1000) for _ in range(length))
        sampling = SamplingParams(max_new_tokens=draw.randint(*_ANSWERS))
        requests.append(GenerateRequest(id=number, prompt_ids=ids, prefix=prefix, sampling=sampling))
    return requests


def _parse(arguments: Sequence[str] | None) -> Settings:
    parser: argparse.ArgumentParser = parser_of(__doc__)
    for name in Settings.__dataclass_fields__:
        value = getattr(Settings(), name)
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default: {value}")
    return Settings(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
