"""Services: processes without an end. They sit on `ragspec` and may use Ray; nothing in the library imports them.

settings.py  what a service is configured with          backend.py   what every route stands on
app.py       the FastAPI app, in one process or in Ray Serve
guard.py     the one way in: who asks, how much, how long
keys.py      who may ask       limits.py    how much      bodies.py  what a body may be
errors.py    every error as OpenAI writes it, and as LanguageTool does
health.py, metrics.py, telemetry.py, logs.py              what operators look at
embedded.py  one process: uvicorn, the engine's thread, signals           serving.py   Ray Serve
openai/, stores/, web/, languagetool/                     the routes
"""
