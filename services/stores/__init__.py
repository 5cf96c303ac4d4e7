"""Files, vector stores and conversations of tenants.

routes.py, vector_stores.py, conversations.py   the routes; schemas.py their fields
library.py     files and stores over one index; records.py their database, blobs.py their bytes
ingest.py      the worker that changes the index, with parsing.py and index_updater.py
"""
