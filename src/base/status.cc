#include "base/status.h"

#include <cerrno>
#include <cstring>

namespace forebay {

std::string_view CodeName(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kInvalidArgument:
      return "invalid argument";
    case Code::kNotFound:
      return "not found";
    case Code::kPermissionDenied:
      return "permission denied";
    case Code::kDataLoss:
      return "data loss";
    case Code::kChanged:
      return "data set changed";
    case Code::kResourceExhausted:
      return "resource exhausted";
    case Code::kUnavailable:
      return "unavailable";
    case Code::kDeadlineExceeded:
      return "deadline exceeded";
    case Code::kCancelled:
      return "cancelled";
    case Code::kUnimplemented:
      return "not supported here";
    case Code::kAlreadyExists:
      return "exists already";
    case Code::kInternal:
      return "internal error";
  }
  return "unknown";
}

std::string Status::ToString() const {
  if (ok()) return "ok";
  return StrCat(CodeName(code_), ": ", message_);
}

Status ErrnoStatus(int error, std::string_view what) {
  Code code = Code::kUnavailable;
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      code = Code::kNotFound;
      break;
    case EACCES:
    case EPERM:
    case EROFS:
      code = Code::kPermissionDenied;
      break;
    case ENOSPC:
    case EDQUOT:
    case ENOMEM:
    case EMFILE:
    case ENFILE:
      code = Code::kResourceExhausted;
      break;
    case EINVAL:
    case ENAMETOOLONG:
    case EISDIR:
      code = Code::kInvalidArgument;
      break;
    case ENOSYS:
    case EOPNOTSUPP:
      code = Code::kUnimplemented;
      break;
    case ECANCELED:
      code = Code::kCancelled;
      break;
    case ETIMEDOUT:
      code = Code::kDeadlineExceeded;
      break;
    default:
      break;
  }
  char text[128];
  // GNU strerror_r: thread-safe, may return a static string instead of filling the buffer.
  const char* reason = strerror_r(error, text, sizeof text);
  return Status(code, StrCat(what, ": ", reason));
}

}  // namespace forebay
