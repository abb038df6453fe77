"""Many users at once: requests come in, over HTTP or from the page, and answers go out as they are generated.

`online` is the service: a queue, a pool that reads pictures, and a thread that runs the engine. `http_api` is the API,
`web` the page, and `replicas` puts one API before several services of a Ray cluster. Read online/service.py first.
"""
