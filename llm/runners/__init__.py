"""The only place that names a device: backends and executors."""
