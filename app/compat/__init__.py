"""Interfaces of other systems: MindFormers, MindSpore Lite, ModelRunner, PaddleNLP, and the reference's programs.

Their calls, settings and command lines come in; calls of the captioner, or settings of this program, go out.
pipeline.py and model_runner.py are Python interfaces. foreign.py recognises a file or line of another system
and passes it to its importer; command_words.py splits a line into words, and foreign_keys.toml has the keys of all
systems. `reference` runs programs unchanged.
Read foreign.py first.
"""
