"""The language half: from a visual query and token ids to text. It knows no pictures."""
