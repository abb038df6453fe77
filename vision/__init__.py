"""The vision half: from pictures to visual queries. It knows no language model."""
