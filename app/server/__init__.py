"""The HTTP service: an OpenAI-compatible API over one `app.service.Service`. FastAPI and uvicorn are used only here."""
