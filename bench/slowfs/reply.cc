#include "slowfs/reply.h"

#include <cstdint>

namespace forebay::slowfs {
namespace {

template <typename... Visitors>
struct Overload : Visitors... {
  using Visitors::operator()...;
};
template <typename... Visitors>
Overload(Visitors...) -> Overload<Visitors...>;

}  // namespace

void Send(Reply& reply, InodeTable& inodes) {
  const fuse_req_t request = reply.request;
  std::visit(Overload{
                 [&](ErrorReply& body) { fuse_reply_err(request, body.error); },
                 [&](EntryReply& body) {
                   if (fuse_reply_entry(request, &body.entry) != 0 && body.entry.ino != 0) {
                     inodes.Forget(body.entry.ino, 1);
                   }
                 },
                 [&](AttrReply& body) { fuse_reply_attr(request, &body.attr, body.timeout_s); },
                 [&](OpenReply& body) {
                   // From the answer on the kernel may release the handle in another thread.
                   const int fd = body.fd.Release();
                   body.info.fh = static_cast<uint64_t>(fd);
                   if (fuse_reply_open(request, &body.info) != 0) OwnedFd closes(fd);
                 },
                 [&](CreateReply& body) {
                   const int fd = body.open.fd.Release();
                   body.open.info.fh = static_cast<uint64_t>(fd);
                   if (fuse_reply_create(request, &body.entry, &body.open.info) != 0) {
                     OwnedFd closes(fd);
                     inodes.Forget(body.entry.ino, 1);
                   }
                 },
                 [&](DataReply& body) { fuse_reply_buf(request, body.data.get(), body.size); },
                 [&](WriteReply& body) { fuse_reply_write(request, body.size); },
                 [&](StatfsReply& body) { fuse_reply_statfs(request, &body.info); },
                 [&](LinkReply& body) { fuse_reply_readlink(request, body.target.c_str()); },
                 [&](AttributeSizeReply& body) { fuse_reply_xattr(request, body.size); },
             },
             reply.body);
}

}  // namespace forebay::slowfs
