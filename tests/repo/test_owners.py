"""Each field of the core's state has one writer."""

from tests.support.owners import PARTS, fields, writers, written_outside

# what each module of the rules changes, besides the classes' own methods
OWNERS = {
    "Inbox": "tips",
    "Outbox": "giving",
    "Closing": "author",
    "Learned": "learning",
    "Loop": "learning",
    "Life": "lifecycle",
    "DataQueue": "data",
    "FragmentState": {"tip": "tips", "adopted_at": "tips"},
    # who is a member is not a field: `Members` changes itself
    "Facts": {"planned": "peer", "heals": "tips", "takeovers": "tips", "members": "lifecycle"},
}


def owner_of(field: str) -> set[str]:
    owner, name = field.split(".")
    match OWNERS[owner]:
        case str(module):
            return {module}
        case dict(modules):
            default = {"FragmentState": "contributions", "Facts": "facts"}[owner]
            return {modules.get(name, default)}
        case _:
            raise AssertionError(owner)


def test_each_field_of_the_state_has_one_writer() -> None:
    state = {"fragment", "facts"}  # methods of its classes
    strange = {name: files - owner_of(name) - state for name, files in writers().items()}
    assert {name: files for name, files in strange.items() if files} == {}
    assert written_outside() == []
    assert fields().keys() == {*PARTS.values(), "FragmentState", "Facts"}
