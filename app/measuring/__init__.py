"""What is measured: times, rates and ceilings, and how they are told. Nothing here answers a question."""
