"""Where pictures come from: names come in; squares of pixels, or an error for each, go out.

`inputs` turns files, folders, lists, tables, archives and addresses into one input per picture. `reading` decodes and
crops them, in processes that can be killed. `prefixes` is the file of pictures that are encoded already. Read
inputs/reading.py first, then reading/reader.py.
"""
