"""HTTP services, which run until a signal stops them. They use `ragspec` and may use Ray; the library never imports them.

A request's way: gateway.AuthMiddleware -> a route -> the backend -> gateway.OutgoingResponse.

settings.py   the configuration                               backend.py    the parts that routes share
app.py        the FastAPI app and the web pages               errors.py     all error responses
gateway.py    admits, reads and answers requests              keys.py       API keys
limits.py     every limit, and the counts behind them         health.py     health checks
metrics.py    counters and traces                             logs.py       logs
embedded.py   the service in one process                      serving.py    the service on Ray Serve
openai/, stores/, languagetool/   the routes                  web/static/   the pages' files
"""
