"""The HTTP API: OpenAI's chat completions over one `app.serving.online.service.Service`."""
