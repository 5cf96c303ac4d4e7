"""HTTP services, which run until a signal stops them. They use `ragspec` and may use Ray; the library never imports them.

A request's way: auth_middleware -> a route -> the backend -> request_limits.OutgoingResponse.

settings.py         the configuration                       backend.py          the parts that routes share
app.py              the FastAPI app                         errors.py           all error responses
auth_middleware.py  keys, hosts and time limits             keys.py, limits.py  API keys and their rate limits
request_limits.py   reading requests, sending responses     health.py           health checks
metrics.py, telemetry.py, logs.py                           counters, traces and logs
embedded.py         the service in one process              serving.py, clustered.py    Ray Serve, and a cluster's deployment
openai/, stores/, languagetool/, web/                       the routes
"""
