"""Models by name: a catalogue of published weights, and addresses `hf:OWNER/NAME` of the Hugging Face Hub.

Names and addresses go in, paths of files on this machine come out; what is missing is fetched with the user's consent.
Read `located.py` first.
"""
