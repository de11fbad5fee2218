#include "peer/membership_message.h"

#include <algorithm>
#include <utility>

#include "base/bytes.h"

namespace forebay::peer::frame {

bool InOrder(const std::vector<Member>& members) {
  const auto wrong = [](const Member& a, const Member& b) { return a.node >= b.node; };
  return std::ranges::adjacent_find(members, wrong) == members.end();
}

void Append(const Frame& frame, std::string* out) {
  const size_t begin = out->size();
  FieldWriter writer(out);
  writer(uint32_t{0}, frame);
  writer.PutAt(begin, static_cast<uint32_t>(out->size() - begin - sizeof(uint32_t)));
}

Result<std::optional<Frame>> Take(std::string_view* in, size_t longest) {
  uint32_t size = 0;
  if (in->size() < sizeof size) return std::optional<Frame>();
  FieldReader prefix(*in);
  prefix(size);
  if (size == 0 || size > longest) {
    return Status(Code::kInvalidArgument, StrCat("a frame of ", size, " bytes"));
  }
  if (prefix.left() < size) return std::optional<Frame>();
  Frame frame;
  FieldReader reader(prefix.View(size));
  reader(frame);
  if (!reader.done()) return Status(Code::kInvalidArgument, "not a frame of this protocol");
  in->remove_prefix(sizeof size + size);
  return std::optional<Frame>(std::move(frame));
}

}  // namespace forebay::peer::frame
