"""The pictures of a job, files and addresses alike, in the order in which they were named."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from llama_adapter.app.inputs import InputsError, InputSpec, PictureInput, check_inputs, count_inputs, read_inputs
from llama_adapter.app.inputs.addresses import check_remote, is_remote, remote_inputs


def check_all_inputs(spec: InputSpec, *, need_questions: bool = False) -> None:
    """Raise InputsError as `check_inputs` does, and for addresses that nothing here can read."""
    check_inputs(spec, need_questions=need_questions)
    addresses = list(filter(is_remote, spec.paths))
    if addresses and spec.shard is not None:
        raise InputsError("--shard does not go with addresses", hint="with --engine ray, all machines share one job")
    for address in addresses:
        check_remote(address)


def read_all_inputs(spec: InputSpec) -> Iterator[PictureInput]:
    """As `read_inputs`, with addresses besides."""
    if not any(map(is_remote, spec.paths)):
        yield from read_inputs(spec)
        return
    yield from itertools.islice(_read_in_turn(dataclasses.replace(spec, limit=None)), spec.limit)


def _read_in_turn(spec: InputSpec) -> Iterator[PictureInput]:
    for path in spec.paths:
        if is_remote(path):
            yield from remote_inputs(path, recursive=spec.recursive)
        else:
            yield from read_inputs(dataclasses.replace(spec, paths=(path,), lists=(), manifests=()))
    yield from read_inputs(dataclasses.replace(spec, paths=()))


def count_all_inputs(spec: InputSpec, *, size: Callable[[PictureInput], int] = lambda picture: 1) -> int | None:
    """As `count_inputs`; None also where it costs a second listing of what is far away."""
    return None if any(map(is_remote, spec.paths)) else count_inputs(spec, size=size)
