"""Who runs next: sequences, slots, scheduler, sampler and the step."""
