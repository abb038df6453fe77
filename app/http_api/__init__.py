"""The HTTP service: an OpenAI-compatible API over one `app/service`. FastAPI and uvicorn are used only here."""
