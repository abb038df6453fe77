"""Everything that is tried on one chip; prints it as JSON."""

import json
import sys
import warnings

from llama_adapter.runtime.devices import open_backend


def main() -> None:
    backend = open_backend("npu:0")
    # Late, because these ask torch for its `npu`.
    from tests.npu.inside import captions, decoder, device

    report = {"device": device.facts(backend), "mixes": decoder.planted_mixes()}
    if "facts" not in sys.argv:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report["runs"] = decoder.runs(backend)
            report["captions"] = captions.comparison()
        report["warnings"] = sorted({str(warning.message) for warning in caught})
    print(json.dumps(report))


if __name__ == "__main__":
    main()
