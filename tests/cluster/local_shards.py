"""Workers in this process, for tests of steps without a cluster; lost ones are replaced as a cluster's are."""

from treaty.cluster.shards import ByRows, Shard, cut_arguments


class LocalShards:
    def __init__(self, count, threads=1):
        self.count, self._threads, self._kept, self.steps = count, threads, {}, 0
        self._shards = [Shard(number, count, threads) for number in range(count)]

    def keep(self, name, array, places=None):
        self._kept[name] = ByRows(array, places=places)
        for number in range(self.count):
            self._give(number, name)

    def _give(self, number, name):
        rows, shard = self._kept[name].of(number, self.count), self._shards[number]
        shard.begin(name, rows.shape, rows.dtype.str)
        for start in range(0, len(rows), 7000):
            shard.fill(name, start, rows[start : start + 7000])

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
