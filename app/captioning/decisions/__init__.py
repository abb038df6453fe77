"""Decisions about answers with choices: the rule, its calibration, and how good a calibration is."""
