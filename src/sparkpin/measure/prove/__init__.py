"""Whether a server says the same of a session however it came to it: cold, from its cache, in company, with drafts."""
