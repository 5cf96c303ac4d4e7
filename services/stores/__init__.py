"""Files, vector stores and conversations of tenants.

routes.py      the routes; schemas.py their fields
library.py     files and stores over one index, and the files' bytes; records.py their database
ingest.py      the worker that changes the index, with uploads.py and index_updater.py
backup.py      copies of an index and of a service's data
"""
