"""One answer: a picture and a question come in, events and an answer go out.

captioner.py is the interface, for one picture or a batch, for threads and event loops. caption_loop.py drives encoder
and engine. `tasks` are the kinds of questions: how each is encoded, run and answered. `decisions` turn probabilities of
choices into a decision or a refusal. Read captioner.py first.
"""
