"""Operators of a decoder: plain torch, and those that a device brings instead."""
