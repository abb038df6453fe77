"""Prints as JSON the results of everything tried on each chip, and facts about the wheel."""

import functools
import importlib
import json
from typing import Any

from llama_adapter.runtime.devices import open_backend
from llama_adapter.runtime.devices.npu_load import load_torch_npu
from tests.npu.inside import decoder, device, few_bits, graphs, in_fork, ranks, wheel_facts
from tests.npu.wheel import CHIPS, SOC, WHOLE_MODEL


def chip(soc: str) -> dict[str, Any]:
    """All results for the chips of `WHOLE_MODEL`; for other chips only facts about the device."""
    backend = open_backend("npu:0")
    report = {"device": device.facts(backend), "mixes": decoder.planted_mixes(), "bits": few_bits.report(backend)}
    if soc in WHOLE_MODEL:
        report |= {"runs": decoder.runs(backend), "captions": decoder.captions_of_both()}
        report["few bits"] = few_bits.runs(backend)
    return report


def compilers() -> dict[str, Any]:
    """Facts about the wheel before a device is open, and decode steps as graphs.

    Both run in one fork, because the graph compilers take seconds to import.
    """
    return {"wheel": wheel_facts.facts(), "graphs": graphs.comparisons()}


def main() -> None:
    load_torch_npu()
    importlib.import_module("torch._dynamo")  # the first operator of a fork with `HostOps` would import it
    decoder.compute_expected()
    few_bits.compute_expected()
    reports = {soc: in_fork(functools.partial(chip, soc), FAKE_SOC=soc) for soc in CHIPS}
    reports |= in_fork(compilers, FAKE_SOC=SOC)
    reports["ranks"] = in_fork(ranks.model, FAKE_SOC=SOC, FAKE_DEVICES="2")
    reports["queue"] = in_fork(ranks.queue, FAKE_SOC=SOC, FAKE_DEVICES="2")
    reports["thread"] = in_fork(device.in_a_thread, FAKE_SOC=SOC, FAKE_DEVICES="2")
    reports["profiled"] = in_fork(device.profiled, FAKE_SOC=SOC)
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
