"""Own data: labelled pictures come in; adapters, scores, thresholds and rounded weights go out.

`labelled` reads data of every kind into examples, and writes the table of `label`. `training` is `train`, `evaluating`
is `eval`, and `scores` computes metrics and writes reports. `calibration` fits thresholds of decisions, and
`quantising` rounds weights by the inputs that samples give. Read labelled/example.py first, then training/run.py.
"""
