"""What each verb of an engine costs when there is more of everything (L5: bounded work).

`stages` fill a storage along one dimension, `verbs` are the calls, `meters` count the work of the storage
where it does not depend on the hour, and `growth` compares two sizes.
"""
