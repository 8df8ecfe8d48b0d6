"""Workers in this process, for tests of steps without a cluster; lost ones are replaced as a cluster's are."""

from treaty.cluster.shards import ByRows, Shard, cut_arguments


class LocalShards:
    def __init__(self, count, threads=1):
        self.count, self._threads, self._kept, self.steps, self.names = count, threads, {}, 0, set()
        self._shards = [Shard(number, count, threads) for number in range(count)]

    def keep(self, name, array, places=None, first=0):
        self._kept[name] = ByRows(array, 0, first, places)
        self.names.add(name)
        for number in range(self.count):
            self._give(number, name)

    def _give(self, number, name):
        kept, shard, start = self._kept[name], self._shards[number], 0
        shard.begin(name, (kept.size(number, self.count), *kept.array.shape[1:]), kept.array.dtype.str)
        for rows in kept.parts(number, self.count, 7000):
            shard.fill(name, start, rows)
            start += len(rows)
        assert shard.is_whole

    def drop(self, name):
        self._kept.pop(name, None)
        for shard in self._shards:
            shard.drop(name)

    def each(self, step, *args):
        self.steps += 1
        return [step(shard, *cut_arguments(args, k, self.count)) for k, shard in enumerate(self._shards)]

    def lose(self, number):
        self._shards[number] = Shard(number, self.count, self._threads)
        for name in self._kept:
            self._give(number, name)
