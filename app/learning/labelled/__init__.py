"""Reads labelled data: pictures with questions and right answers. Decodes no picture and imports no model."""
