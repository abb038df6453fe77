"""Reads labelled data: pictures with questions and right answers. Decodes no picture and imports no model.

Also the table that `label` writes (`label_table.py`), and the order in which it asks for labels (`order.py`).
"""
