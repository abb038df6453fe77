"""The web page: Gradio, and nothing of it elsewhere. Importing it turns Gradio's own reports to the network off."""

import os

# Read by Gradio and by the Hugging Face hub client that it brings along, when they are imported: no telemetry.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# Its statistics of events, which nobody reads here: they would be computed anew after every event, of 10,000 events.
os.environ["GRADIO_ANALYTICS_MAX_EVENTS"] = "1"
os.environ["GRADIO_ANALYTICS_CACHE_FREQUENCY"] = str(2**62)
