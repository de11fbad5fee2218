# Writes a file's bytes as C++: cmake -DIN=page.html -DOUT=page.cc -P embed_page.cmake
file(READ ${IN} bytes HEX)
string(REGEX REPLACE "(................................)" "\\1\n" lines "${bytes}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "'\\\\x\\1'," lines "${lines}")
file(WRITE ${OUT} "// Made from daemon/page.html.
#include \"daemon/page.h\"

namespace forebay {
namespace {
constexpr char kPage[] = {
${lines}};
}  // namespace

std::string_view StatusPage() { return {kPage, sizeof kPage}; }

}  // namespace forebay
")
