"""OpenAI's API: what may be asked (`types`), how an answer is run, streamed, cited and counted, and the routes.

What differs from OpenAI's own service:

* Fields that are not known, or ask for what cannot be done, are refused with 400 and their name. Taken without any effect are
  those of `ragspec.rag.openai_fields.IGNORED`, and a message's `name`.
* What is left out has the value of the service's settings (`generation`), not OpenAI's default. A prompt that does not fit beside
  `max_tokens` is refused; passages make room for it, and `ragspec.dropped_passages` says how many did.
* Beside those fields: vLLM's `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos` and `cache_salt`; `speculation`,
  `retrieval`, `conversation`, `citations`, `privacy` and `metrics`. Citations in Anthropic's words are a message's
  `content_blocks`, in Cohere's its `citations`. `metrics` are for trusted keys, and simply not there for others.
* Rejected tokens of a prediction were drafted and thrown away; they are no part of `completion_tokens`.
* `privacy: "strict"`: a stream comes at a fixed pace in chunks of one size, without log-probabilities.
* An answer that fails on the way ends its stream with an event `{"error": ...}`, and without `[DONE]`.
"""
