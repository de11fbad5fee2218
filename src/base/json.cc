#include "base/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>

namespace forebay::control {
namespace {

// Length of the UTF-8 sequence at `at`, 0 where there is none (overlong forms and surrogates count
// as none).
size_t Utf8Length(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) {
    return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0u;
  };
  const auto tail = [&](size_t i) { return (byte(i) & 0xC0u) == 0x80u; };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) return tail(1) ? 2 : 0;
  if (first >= 0xE0 && first <= 0xEF) {
    if (!tail(1) || !tail(2)) return 0;
    if (first == 0xE0 && byte(1) < 0xA0) return 0;
    if (first == 0xED && byte(1) > 0x9F) return 0;
    return 3;
  }
  if (first >= 0xF0 && first <= 0xF4) {
    if (!tail(1) || !tail(2) || !tail(3)) return 0;
    if (first == 0xF0 && byte(1) < 0x90) return 0;
    if (first == 0xF4 && byte(1) > 0x8F) return 0;
    return 4;
  }
  return 0;
}

void AppendUtf8(uint32_t code, std::string* out) {
  const auto put = [&](uint32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | code >> 6);
    put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | code >> 12);
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | code >> 18);
    put(0x80 | (code >> 12 & 0x3F));
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  }
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Result<JsonValue> Document() {
    JsonValue value;
    if (!Take(&value, 0) || (Spaces(), at_ != text_.size() && !Fail("more text after the value"))) {
      return Status(Code::kInvalidArgument, StrCat("not JSON at byte ", at_, ": ", why_));
    }
    return value;
  }

 private:
  bool Fail(const char* why) {
    why_ = why;
    return false;
  }
  char Peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  bool Skip(char c) {
    if (Peek() != c || at_ >= text_.size()) return false;
    ++at_;
    return true;
  }
  void Spaces() {
    while (at_ < text_.size() &&
           (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n' || text_[at_] == '\r')) {
      ++at_;
    }
  }

  bool Word(std::string_view word, JsonValue value, JsonValue* out) {
    if (text_.substr(at_, word.size()) != word) return Fail("not a value");
    at_ += word.size();
    *out = std::move(value);
    return true;
  }

  bool Take(JsonValue* out, int depth) {
    Spaces();
    switch (Peek()) {
      case '{':
        return depth < JsonValue::kMaxDepth ? Object(out, depth + 1) : Fail("nested too deeply");
      case '[':
        return depth < JsonValue::kMaxDepth ? Array(out, depth + 1) : Fail("nested too deeply");
      case '"': {
        std::string text;
        if (!Text(&text)) return false;
        *out = std::move(text);
        return true;
      }
      case 't':
        return Word("true", true, out);
      case 'f':
        return Word("false", false, out);
      case 'n':
        return Word("null", nullptr, out);
      default:
        return Number(out);
    }
  }

  bool Object(JsonValue* out, int depth) {
    ++at_;
    JsonObject members;
    Spaces();
    if (!Skip('}')) {
      do {
        Spaces();
        if (Peek() != '"') return Fail("a name in quotes is missing");
        JsonMember& member = members.emplace_back();
        if (!Text(&member.name)) return false;
        Spaces();
        if (!Skip(':')) return Fail("':' is missing");
        if (!Take(&member.value, depth)) return false;
        Spaces();
      } while (Skip(','));
      if (!Skip('}')) return Fail("',' or '}' is missing");
    }
    const auto by_name = [](const JsonMember& a, const JsonMember& b) { return a.name < b.name; };
    if (!std::is_sorted(members.begin(), members.end(), by_name)) {
      std::sort(members.begin(), members.end(), by_name);
    }
    const auto same = [](const JsonMember& a, const JsonMember& b) { return a.name == b.name; };
    if (std::adjacent_find(members.begin(), members.end(), same) != members.end()) {
      return Fail("a name stands twice in the object that ends here");
    }
    *out = std::move(members);
    return true;
  }

  bool Array(JsonValue* out, int depth) {
    ++at_;
    JsonArray values;
    Spaces();
    if (!Skip(']')) {
      do {
        if (!Take(&values.emplace_back(), depth)) return false;
        Spaces();
      } while (Skip(','));
      if (!Skip(']')) return Fail("',' or ']' is missing");
    }
    *out = std::move(values);
    return true;
  }

  bool Hex4(uint32_t* code) {
    if (text_.size() - at_ < 4) return Fail("four hexadecimal digits are missing");
    const char* begin = text_.data() + at_;
    const auto [end, error] = std::from_chars(begin, begin + 4, *code, 16);
    if (error != std::errc() || end != begin + 4) {
      return Fail("four hexadecimal digits are missing");
    }
    at_ += 4;
    return true;
  }

  bool Escape(std::string* out) {
    switch (const char c = Peek(); ++at_, c) {
      case '"':
      case '\\':
      case '/':
        out->push_back(c);
        return true;
      case 'b':
        out->push_back('\b');
        return true;
      case 'f':
        out->push_back('\f');
        return true;
      case 'n':
        out->push_back('\n');
        return true;
      case 'r':
        out->push_back('\r');
        return true;
      case 't':
        out->push_back('\t');
        return true;
      case 'u':
        break;
      default:
        return Fail("an unknown escape");
    }
    uint32_t code = 0;
    if (!Hex4(&code)) return false;
    if (code >= 0xD800 && code <= 0xDFFF) {
      uint32_t low = 0;
      if (code >= 0xDC00 || !Skip('\\') || !Skip('u') || !Hex4(&low) || low < 0xDC00 ||
          low > 0xDFFF) {
        return Fail("half of a surrogate pair");
      }
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    AppendUtf8(code, out);
    return true;
  }

  bool Text(std::string* out) {
    ++at_;
    while (at_ < text_.size()) {
      // Plain characters are taken in runs.
      size_t run = at_;
      while (run < text_.size() && text_[run] != '"' && text_[run] != '\\' &&
             static_cast<unsigned char>(text_[run]) >= 0x20) {
        const size_t length = Utf8Length(text_, run);
        if (length == 0) {
          at_ = run;
          return Fail("not UTF-8");
        }
        run += length;
      }
      out->append(text_.substr(at_, run - at_));
      at_ = run;
      if (at_ == text_.size()) break;
      if (Skip('"')) return true;
      if (!Skip('\\')) return Fail("a control character in a text");
      if (!Escape(out)) return false;
    }
    return Fail("the text does not end");
  }

  static bool Digit(char c) { return c >= '0' && c <= '9'; }

  bool Number(JsonValue* out) {
    const size_t begin = at_;
    bool whole = true;
    Skip('-');
    if (!Digit(Peek())) {
      at_ = begin;
      return Fail("not a value");
    }
    if (!Skip('0')) {
      while (Digit(Peek())) ++at_;
    }
    if (Skip('.')) {
      whole = false;
      if (!Digit(Peek())) return Fail("a digit is missing");
      while (Digit(Peek())) ++at_;
    }
    if (Peek() == 'e' || Peek() == 'E') {
      whole = false;
      ++at_;
      if (!Skip('+')) Skip('-');
      if (!Digit(Peek())) return Fail("a digit is missing");
      while (Digit(Peek())) ++at_;
    }
    const char* first = text_.data() + begin;
    const char* last = text_.data() + at_;
    if (whole) {
      int64_t value = 0;
      if (std::from_chars(first, last, value).ec == std::errc()) {
        *out = value;
        return true;
      }
    }
    double value = 0;
    if (std::from_chars(first, last, value).ec != std::errc() || !std::isfinite(value)) {
      return Fail("the number before this does not fit");
    }
    *out = value;
    return true;
  }

  std::string_view text_;
  size_t at_ = 0;
  const char* why_ = "";
};

void WriteText(std::string_view text, std::string* out) {
  static constexpr char kHex[] = "0123456789abcdef";
  out->push_back('"');
  size_t plain = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    if (c >= 0x20 && c != '"' && c != '\\') continue;
    out->append(text.substr(plain, i - plain));
    plain = i + 1;
    out->push_back('\\');
    if (c == '"' || c == '\\') {
      out->push_back(static_cast<char>(c));
    } else {
      out->append("u00");
      out->push_back(kHex[c >> 4]);
      out->push_back(kHex[c & 15]);
    }
  }
  out->append(text.substr(plain));
  out->push_back('"');
}

template <typename N>
void WriteNumber(N value, std::string* out) {
  char digits[40];
  const auto [end, error] = std::to_chars(digits, digits + sizeof(digits), value);
  out->append(digits, error == std::errc() ? end : digits);
}

auto At(const JsonObject& members, std::string_view name) {
  return std::lower_bound(members.begin(), members.end(), name,
                          [](const JsonMember& m, std::string_view n) { return m.name < n; });
}

}  // namespace

Result<JsonValue> JsonValue::Parse(std::string_view text) { return Parser(text).Document(); }

std::string JsonValue::Write() const {
  std::string out;
  WriteTo(&out);
  return out;
}

void JsonValue::WriteTo(std::string* out) const {
  if (const bool* flag = boolean()) {
    out->append(*flag ? "true" : "false");
  } else if (const int64_t* whole = integer()) {
    WriteNumber(*whole, out);
  } else if (const double* real = std::get_if<double>(&value_)) {
    // A whole number has one form only, so that text and value stay equal both ways.
    if (!std::isfinite(*real)) {
      out->append("null");
    } else if (*real == std::floor(*real) && std::abs(*real) < 1e15) {
      WriteNumber(static_cast<int64_t>(*real), out);
    } else {
      WriteNumber(*real, out);
    }
  } else if (const std::string* word = text()) {
    WriteText(*word, out);
  } else if (const JsonArray* values = array()) {
    out->push_back('[');
    for (size_t i = 0; i < values->size(); ++i) {
      if (i > 0) out->push_back(',');
      (*values)[i].WriteTo(out);
    }
    out->push_back(']');
  } else if (const JsonObject* members = object()) {
    out->push_back('{');
    for (size_t i = 0; i < members->size(); ++i) {
      if (i > 0) out->push_back(',');
      WriteText((*members)[i].name, out);
      out->push_back(':');
      (*members)[i].value.WriteTo(out);
    }
    out->push_back('}');
  } else {
    out->append("null");
  }
}

std::optional<double> JsonValue::number() const {
  if (const int64_t* whole = integer()) return static_cast<double>(*whole);
  if (const double* real = std::get_if<double>(&value_)) return *real;
  return std::nullopt;
}

std::optional<int64_t> JsonValue::IntegerOrText() const {
  if (const int64_t* whole = integer()) return *whole;
  const std::string* word = text();
  if (word == nullptr) return std::nullopt;
  int64_t value = 0;
  const char* end = word->data() + word->size();
  const auto [at, error] = std::from_chars(word->data(), end, value);
  if (error != std::errc() || at != end) return std::nullopt;
  return value;
}

const JsonValue* JsonValue::Find(std::string_view name) const {
  const JsonObject* members = object();
  if (members == nullptr) return nullptr;
  const auto at = At(*members, name);
  return at != members->end() && at->name == name ? &at->value : nullptr;
}

JsonValue* JsonValue::Find(std::string_view name) {
  return const_cast<JsonValue*>(static_cast<const JsonValue*>(this)->Find(name));
}

void JsonValue::Set(std::string name, JsonValue value) {
  if (!is_object()) value_ = JsonObject();
  auto& members = std::get<JsonObject>(value_);
  const auto at = members.begin() + (At(members, name) - members.cbegin());
  if (at != members.end() && at->name == name) {
    at->value = std::move(value);
  } else {
    members.insert(at, JsonMember{std::move(name), std::move(value)});
  }
}

bool JsonValue::operator==(const JsonValue& other) const { return value_ == other.value_; }

}  // namespace forebay::control
