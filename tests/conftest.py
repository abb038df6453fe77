"""How properties are tried: the same examples each time, and however long one takes on a busy machine.

Other examples, and more of them: `pytest --hypothesis-profile explore`.
"""

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeatable")
