"""Parts of `scripts.prove_jobs`: folders of drawings, kills at random moments, and jobs with Ray."""
