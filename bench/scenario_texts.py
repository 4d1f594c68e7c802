"""The texts of bench/scenarios.py that are our own; the others are Python's documentation and sources, which lie beside every Python."""

from __future__ import annotations

RAG_TOPICS = (("assignment",), ("import", "context-managers"), ("formatstrings",), ("debugger",), ("try", "exceptions", "execmodel"))
"""Of each document the topics of pydoc_data that it is made of, the document that is asked about most first."""

RAG_SYSTEM = "You answer questions about the text that you are given. Use only what the text says, and answer in one sentence."

RAG_QUESTIONS = (
    "What does the text say about {term}, and where is it first mentioned?",
    "How is {term} used according to the text? Name one example.",
    "Which rule in the text has to do with {term}?",
    "Explain in plain words what {term} means in this text.",
    "Is there an exception to what the text says about {term}?",
    "A colleague of mine claims that {term} is not mentioned at all. Is that right, and if not, which sentence shows it?",
    "Which other terms does the text name together with {term}?",
    "What happens first, and what happens after it, where the text speaks of {term}?",
    "Quote the sentence of the text that tells most about {term}.",
    "If I change {term} in my program, what else do I have to think of, as far as this text tells?",
    "Give a short definition of {term} that agrees with the text.",
    "Why does the text mention {term}?",
)

CHAT_SYSTEM = """You are the assistant of a public library. You help readers to plan, to learn and to find books.
Rules for your answers:
1. Answer in plain words and in at most three sentences, unless the reader asks for a list.
2. If the reader asks for a list, give at most five points, each on a line of its own, the most useful first.
3. Say so when you do not know something. Never invent the title of a book, the name of a person, or a number.
4. Ask at most one question in return, and only if the answer depends on it.
5. Opening hours are Monday to Friday from nine to seven and Saturday from ten to four. On Sundays the library is closed.
6. A reader may borrow twelve books for four weeks, and prolong each of them twice if nobody else waits for it. Films and games may be kept
for one week. Reference books stay in the reading room, where copying is allowed for private use.
7. The reading room on the second floor is quiet; groups meet in the four rooms on the first floor, which can be booked for two hours.
8. Readers under fourteen need the consent of a parent for films and for the computers.
9. Lost books are paid for at their price when they were bought, and five more for the work; late ones cost twenty cents a day.
10. Keep to the subject. If a reader is angry, stay friendly and name the desk on the ground floor, where a person can help.
Remember what the reader has told you earlier in the conversation, and build on it."""

CHAT_SUBJECTS = ("growing tomatoes on a balcony", "a cycling tour along a river", "learning to play the guitar", "watching the night sky")

CHAT_TURNS = (
    "Hello. I have a free month in front of me and want to spend it on {subject}. I have never done that before. Where should I begin?",
    "Thank you. I have about two hours a day and not much money. Does that change what you would tell me about {subject}?",
    "What do I need to buy for it, and what can I borrow or make at home? Please give me a list.",
    "My neighbour says that most people who try {subject} give up in the second week. Why may that be, and how do I avoid it?",
    "Now make me a plan for the first week, one line for each day. Remember that I have two hours a day.",
    "On Wednesday I have no time at all. What of the plan can I leave out, and what should move to another day?",
    "Which shelf of your library should I look at, and when can I come on a Saturday to do that?",
    "Good. Please sum up in three sentences what we have said about {subject}, so that I can write it down.",
)

FEW_SHOT_TASK = "You turn the messages of customers into records. Answer with one line of JSON and nothing else, as in these examples."

FEW_SHOT_EXAMPLES = (
    ("The kettle that I got on Monday leaks at the handle. I want another one, please.", "kettle", "defect", "replace", 2),
    ("Where is my parcel? You said Thursday and it is Sunday now, and the birthday is over.", "parcel", "late", "inform", 3),
    ("I was charged twice for the same lamp, order 5512. Please send one of the two sums back.", "lamp", "billing", "refund", 2),
    ("Just a word of thanks: the chair came in time and it is lovely to sit on.", "chair", "praise", "none", 0),
    ("The drill gives off smoke as soon as I turn it on. That is dangerous! I have pulled the plug.", "drill", "defect", "call", 3),
    ("Can the blue tent be had in green as well, and what would that cost me?", "tent", "question", "inform", 1),
    ("I ordered boots in size 42 and got size 40. Send the right ones and tell me how to return these.", "boots", "mistake", "replace", 2),
    ("Please cancel my order of the two radios from this morning, I found them in the cellar.", "radio", "cancel", "cancel", 1),
    ("The manual of the sewing machine is in a language that I do not read. Is there another?", "sewing machine", "question", "send", 1),
    ("For the third time the driver left my flowers in the rain instead of ringing next door.", "flowers", "delivery", "call", 3),
    ("The screen of my tablet shows a green line since the last update. It is four months old.", "tablet", "defect", "repair", 2),
    ("You have my old address still. The new one is 4 Mill Lane; the bookcase should go there.", "bookcase", "address", "change", 1),
)
"""Message, product, kind, action, urgency."""

FEW_SHOT_QUERIES = (
    "The toaster burns everything on the left side, whatever I turn the knob to.",
    "I have paid for express delivery and the skis are still not here. We leave tomorrow!",
    "How long is the warranty of the coffee grinder?",
    "The invoice for the desk has my name spelt wrong, I need a new one for my taxes.",
    "The bicycle bell is the best that I ever had. My compliments.",
    "One of the six glasses was broken when I opened the box.",
    "Please send the garden hose to my sister's address instead.",
    "I do not want the second blanket any more; it has not been sent yet, has it?",
    "The battery of the torch gets so hot that it hurts to touch.",
    "You sent me a red curtain and I had ordered a white one.",
    "Does the shelf come with screws, or must I buy them?",
    "My refund for the shoes was promised for last week. Nothing has come so far.",
    "The driver was very kind and carried the washing machine up to the fourth floor.",
    "After two days the zip of the rucksack came off.",
    "Could you tell me when the yellow raincoat will be on sale again?",
    "The app of the scale says that my account does not exist, though I made it yesterday.",
)

CODE_SYSTEM = "You edit Python programs. You get files and a request, and answer with the changed lines only."

CODE_CONTEXTS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("json.scanner", "json.decoder"),
        (
            "Give JSONDecodeError an attribute `line` that holds the text of the line in which the error was found.",
            "Rename the parameter `strict` of py_scanstring to `allow_control`, with the opposite meaning, and adapt the callers.",
            "Add type hints to the function linecol.",
            "Raise a JSONDecodeError, in place of a RecursionError, where arrays are nested more than a thousand deep.",
        ),
    ),
    (
        ("bisect", "fnmatch", "glob"),
        (
            "Write a docstring with two examples for glob.escape.",
            "Let fnmatch.filter take several patterns, and return each name that matches one of them.",
            "Add a function bisect.index that finds the leftmost value equal to x, and raises ValueError if there is none.",
            "Let glob.iglob skip folders that cannot be read, and hand their names to a function that the caller may give.",
        ),
    ),
)
"""Of each repository its files, as modules of the standard library, and what is asked for."""

BEST_OF_TASKS = ("Write a headline for this article.", "Write the first sentence of a letter to the editor about this article.")

LONG_PROMPT = "Write a long and detailed report on the history of bridges, from the first logs over a stream to those of today."
