"""What is promised of folder jobs, put to the proof: kills, full disks, memory, resuming. See scripts/prove_jobs.py."""
