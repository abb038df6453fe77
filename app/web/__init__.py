"""The web page, the only room that imports Gradio. Importing it turns Gradio's reports to the network off."""

import os

# Read when Gradio and the Hugging Face hub client are imported: no telemetry.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# Statistics of events, which are not used here; Gradio would recompute them after every event.
os.environ["GRADIO_ANALYTICS_MAX_EVENTS"] = "1"
os.environ["GRADIO_ANALYTICS_CACHE_FREQUENCY"] = str(2**62)
