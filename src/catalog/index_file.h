// Index files that other programs leave beside shards: DALI's `wds2idx` and `tfrecord2idx` write
// them. They are taken as hints of where payloads end, so that the headers there can be read many
// at a time; what a shard holds is decided by the shard. A wrong or old index costs reads, nothing
// else.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "catalog/catalog.h"

namespace forebay {

// The ends of the shard's payloads, in order, by `shard.tar.idx` or `shard.idx` beside it; empty
// where there is none that is understood.
std::vector<uint64_t> IndexedPayloadEnds(const std::string& shard, Format format);

// The same from an index's text.
std::vector<uint64_t> ParseIndex(std::string_view text, Format format);

}  // namespace forebay
