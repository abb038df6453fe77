"""Jobs over many machines: Ray Data reads the pictures, an actor for each device answers, the driver alone writes.

Ray is imported here and nowhere else, and only when a job asks for it.
"""
