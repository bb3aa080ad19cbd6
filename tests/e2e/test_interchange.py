#!/usr/bin/python3
"""Data and models of other programs, end to end: token files, imports, jobs that start from a checkpoint. Arguments: only the tests
named."""

import os
import struct

from harness import Cluster, check, main, pb, reference, refused_worker, tiny_job


def megatron(stem, documents, width=2, version=1):
    """A Megatron-LM indexed data set: NAME.bin has the tokens, NAME.idx lengths, positions and documents."""
    kind, code = ("H", 8) if width == 2 else ("i", 4)
    with open(stem + ".bin", "wb") as file:
        for tokens in documents:
            file.write(struct.pack(f"<{len(tokens)}{kind}", *tokens))
    lengths = [len(tokens) for tokens in documents]
    positions = [sum(lengths[:i]) * width for i in range(len(lengths))]
    with open(stem + ".idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, code, len(lengths), len(lengths) + 1))
        file.write(struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *positions))
        file.write(struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1)))
    return stem + ".bin"


def lines_of(path):
    with open(path, "rb") as file:
        return [list(line) for line in file.read().splitlines(keepends=True)]


# ---- token files ----

def test_megatron_data_trains_like_the_bytes_it_holds():
    """The same tokens in another format, in one file or several, whatever their width: the same weights."""
    for width, cut in ((2, None), (4, 1234)):
        with Cluster() as cluster:
            cluster.start_coordinator()
            documents = lines_of(cluster.data)
            megatron(os.path.join(cluster.dir, "set-0"), documents[:cut], width)
            if cut:
                megatron(os.path.join(cluster.dir, "set-1"), documents[cut:], width)
            cluster.submit(tiny_job(cluster, data__path=os.path.join(cluster.dir, "set-*.bin"),
                                    data__tokens=pb.TOKEN_FORMAT_MEGATRON))
            for _ in range(2):
                cluster.start_worker()
            check(cluster.wait_finished() == reference(), "the format of the data changes the weights")


def test_bad_megatron_data_ends_the_worker():
    with Cluster() as cluster:
        cluster.start_coordinator()
        documents = lines_of(cluster.data)[:200]
        cases = {}
        for name, fragments in (("no-index", ["no-index.idx", "cannot open"]), ("version", ["version.idx", "version 2"]),
                                ("cut", ["cut.idx"]), ("short", ["short.idx"])):
            cases[name] = (megatron(os.path.join(cluster.dir, name), documents, version=2 if name == "version" else 1), fragments)
        os.unlink(os.path.join(cluster.dir, "no-index.idx"))
        os.truncate(os.path.join(cluster.dir, "cut.idx"), 100)
        os.truncate(os.path.join(cluster.dir, "short.bin"), 1000)
        for name, (path, fragments) in cases.items():
            cluster.submit(tiny_job(cluster, name=name, data__path=path, data__tokens=pb.TOKEN_FORMAT_MEGATRON))
            refused_worker(cluster.start_worker(job=name), *fragments)


if __name__ == "__main__":
    main([test for name, test in list(globals().items()) if name.startswith("test_")])
