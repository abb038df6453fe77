"""Many pictures: a job comes in, and files of records, tables and prefixes go out. A job can be continued.

run.py is a job from top to bottom: it locks the file of records, plans, answers, writes and reports. `records` is the
format and its file, `exports` turns records into tables and texts, and `clusters` answers on a Ray cluster. Read run.py
first.
"""
