"""Parts of `scripts.prove_jobs` that tests run too: folders of drawings, and kills at random moments."""
