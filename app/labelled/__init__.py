"""Labelled data: pictures with questions and right answers. Opens no picture and imports no model."""
