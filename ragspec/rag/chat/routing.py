"""Whether a message of a chat is searched for in the documents: by signs in its words, each with a weight.

Greetings, thanks, requests about the conversation, texts to correct and small talk are not searched for. A message without such a
sign is. The weights were fitted to `pipelines/benchmarks/documentation/tuning/routing.jsonl`.

    >>> needs_documents("Thanks, that was it!"), needs_documents("Thanks! And where is the log file?")
    (False, True)
"""

import re

_MAX_READ_CHARS = 500
_COURTESY = re.compile(
    r"(?i)\W*(?:(?:nice to meet you|(?:no|any) (?:more|further|other) questions|hi|hello|hey|hallo|hola|bonjour|salut|"
    r"ciao|servus|moin|welcome|greetings|(?:good|nice) (?:morning|afternoon|evening|night|day)|guten (?:morgen|tag|"
    r"abend)|there|all|folks|everyone|thanks|thank you|thank|thx|ty|cheers|danke(?: schön)?|merci|gracias|grazie|"
    r"obrigad[oa]|tack|beaucoup|a lot|so much|very much|(?:much )?appreciated|much|again|ok|okay|k|yes|yeah|yep|no|"
    r"nope|sure|fine|great|good|nice|cool|perfect|awesome|excellent|wonderful|super|well|right|alright|exactly|got it|"
    r"i see|never ?mind|sorry|lol|haha|hmm|oh|bye|goodbye|tschüss|adieu|see you|later|soon|please|bitte|for now|"
    r"and you|then|so|well done|good luck|happy new year|merry christmas|congratulations|you(?:'re| are) welcome|"
    r"my friend|today|tomorrow|go on|continue|stop)(?!\w)\W*)+"
)
_POLITE = r"^\W*(?:(?:can|could|would|will|please)\s+(?:you\s+)?(?:please\s+)?|please\s+)?(?:help me (?:to )?)?"
_INTERCEPT = -0.5
_SIGNS = {
    "conversation": (
        4.7,
        r"\b(?:my|your) (?:\w+ )?(?:question|answer|reply|response)\b|\byour (?:\w+ )?message|\byou answer\b|\b(?:my|"
        r"your|our|the|this|that) (?:\w+ )?(?:last|first|previous|earlier|latest) (?:\w+ )?(?:question|answer|reply|"
        r"response|one|thing I)|\bof my questions|\b(?:this|our) (?:conversation|chat|discussion|talk)\b(?! \w+ed)|"
        r"\b(?:did|have|do|had) (?:I|we) (?:just )?(?:ask|say|said|discuss|talk|tell|told|mention|cover)|\bwhat (?:I|"
        r"we|you) (?:\w+ )?(?:said|meant|asked|discussed|told)|\bI (?:said|meant|asked|did ?n.t (?:get|understand))|"
        r"\b(?:so far|until now|from now on|something else|once more|in other words|bullet points|in one sentence|"
        r"elaborate|like I(?:'m| am) five|differently|mean by that)\b|^(?!.*\b(?:how|can|does|do|"
        r"is) )(?:.*\b)(?:shorter|longer|simpler|briefer|politer)\b|\bthat(?:'s| is| makes)(?: \w+)? (?:wrong|right|"
        r"sense|not (?:true|right|what))|"
        rf"{_POLITE}(?:repeat|say|explain|put|make|phrase|rephrase|summari[sz]e|shorten|simplify|turn|tell me)(?: me)? "
        r"(?:that|it|this|what|your|the (?:first|second|third|last) (?:point|part|one))\b(?! (?:an?|the|is|are|happens|"
        r"\w+ (?:is|are|does)))",
    ),
    "correction": (
        4.5,
        rf"{_POLITE}(?:correct|proof-?read|fix|check|improve|rewrite|rephrase|polish|edit|revise|spell-?check|turn|translate|"
        rf"make|add)\b[^:?]{{0,40}}"
        r"(?::|\b(?:this sentence|this text|following|my|grammar(?! file)|spelling|wording|sentences?|english|"
        r"paragraph|letter|punctuation|mistakes|commas|this|these)\b|[\"“])|\b(?:sentence|grammar|spelling|phrase|"
        r"word|english)\b[^:\"“]{0,30}(?:[:\"“]|\?\s)|\b(?:is|which)\b[^?]{0,12}(?:[\"“]|right, ).{1,60}(?:correct|"
        r"right|[\"”]\W*$)|\b(?:synonym|opposite|rhyme)s?\b|\bhow do I say\b",
    ),
    "personal": (
        5.0,
        r"\b(?:who|what|how|where|how old|why|which model) (?:are|were) you\b(?! (?:able|supposed|allowed))|\b(?:made|"
        r"created|built) you\b|\b(?:do|did|would|can|could|are|were|will|have) you (?:think|like|feel|live|dream|"
        r"speak|remember|believe|love|hate|prefer|enjoy|sleep|eat|have (?:feelings|friends|a name|any plans)|hear me|"
        r"see me|there|sure|real|human|a (?:human|robot|bot|machine|person)|be|sing|play|lie|do all|know (?:me|my)|"
        r"ever)\b|\byourself\b|\byour (?:favou?rite|name|opinion|hobb|age|birthday|day|help)|\byou(?: already|"
        r" just)? (?:are|were|told|said|did|sound|seem|made|forgot|helped)\b|\blanguages do you\b|\bcan you do\b|"
        r"\bwe (?:be|are done)\b|\blet(?:'s| us)\b|\bwhat(?:'s| is) up\b|\byou alright\b|\bhow(?:'s| is) (?:it going|"
        r"your|life|everything)\b|\bgeht['’]?s\b|\bpretend\b|\banswer in\b|^\W*(?:I(?:'m| am| feel| love| like| hate|"
        r" miss| had an?| wish)(?: so)? (?!(?:(?!going to (?:bed|sleep|work))\w+ing|on|in|not able|unable)\b))|"
        r"\b(?:bored|lonely)\b",
    ),
    "pleased": (
        2.6,
        r"\b(?:helpful|that was (?:it|exactly)|that (?:works|helps)|nice (?:to|talking)|talk to you|mistyped|reicht|"
        r"was all)\b|\bthanks?\W*$",
    ),
    "play": (
        4.1,
        r"\b(?:jokes?|riddles?|poems?|haikus?|limericks?|rhymes?|songs?|lyrics|(?:short|bedtime|funny) story|"
        r"fairy ?tales?|puns?|fun facts?|motivation|compliments?|horoscope|something (?:interesting|funny|nice)|"
        r"day is it|name my|so (?:hot|cold|tired)|tea or coffee|(?:an?|this) (?:e-?mail|letter) to)\b|"
        r"\b\d+\s*(?:times|plus|minus|divided by|% of|percent of|[-+*/x×÷])\s*\d+\s*\??\s*$",
    ),
    "asks": (
        -1.8,
        r"(?:^|[.!?,:]\s+|\b(?:and|but|or|so) )(?:what|which|where|when|how|why|who|whose|in which|is there|are there|does|"
        r"do|is|will|are|would|"
        r"can (?!you (?:help|please))|should|must|may|did|wie|was|wo|wann|warum|welche|comment|pourquoi|où|quel)\b|"
        r"\btell me (?:how|about|the|which)\b|\bhow to\b|\bdifference\b|\bwhether\b|^\W*(?:and|then|or)\b",
    ),
    "wants": (
        -1.7,
        r"^\W*(?:(?:please|can you|could you|would you) )*(?:show|list|explain|describe|compare|find|name|"
        r"summari[sz]e|give|look up|search|define|convert)\b (?!me some|me (?:three|some) ideas|a name|that|it\b)",
    ),
    "identifier": (-0.7, r"(?<![\w.-])(?:--?[a-z][\w-]*|[\w-]*(?:\w[._/]\w|(?-i:[a-z][A-Z]|[A-Za-z]\d))[\w./-]*)"),
    "matter": (
        -3.3,
        r"\b(?:options?|flags?|files?|ports?|servers?|clients?|install\w*|config\w*|settings?|errors?|commands?|"
        r"defaults?|version|packages?|logs?|daemons?|services?|pass(?:words?|phrases?)|certificates?|databases?|data|"
        r"disks?|memory|network|users?|accounts?|parameters?|variables?|documents?|manual|reports?|backups?|archives?|"
        r"rules?|polic(?:y|ies)|licen[cs]es?|limits?|timeouts?|queues?|scripts?|systems?|hosts?|keys?|modules?|"
        r"plugins?|restart\w*|supports?|start\w*|programs?|printers?|printing|table|page|pages|chapter|section|"
        r"values?|sizes?|formats?|syntax|example|functions?|class|method|contract|customers?|employees?|department|"
        r"invoice|warranty|warnings?|upgrade|downgrade|scan\w*|parser?|calendars?|thread|used?|run|runs|running)\b",
    ),
    "exclaims": (2.2, r"^[^?]*!$"),
}
"""Weights above 0 speak against a search. Each sign counts once."""
_PATTERNS = {name: (weight, re.compile(pattern, re.IGNORECASE)) for name, (weight, pattern) in _SIGNS.items()}


def needs_documents(text: str) -> bool:
    """Whether a message asks for something that documents may hold."""
    if len(text) > _MAX_READ_CHARS:  # up to a whole word
        text = text[:_MAX_READ_CHARS].rpartition(" ")[0] or text[:_MAX_READ_CHARS]
    text = text.strip()
    said = text[lead.end() :] if (lead := _COURTESY.match(text)) else text
    if not re.search(r"\w", said):
        return False
    if corrected := _PATTERNS["correction"][1].search(said):
        said = said[: corrected.end()]  # Why: the words of a text to correct are no sign
    return _INTERCEPT + sum(weight for weight, pattern in _PATTERNS.values() if pattern.search(said)) <= 0.0
