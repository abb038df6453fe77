"""The HTTP API: OpenAI's completions, responses, files and batches over one `app.serving.online.service.Service`."""
