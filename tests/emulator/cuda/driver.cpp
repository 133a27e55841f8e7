// main of a sanitized kernel: reads the call from a file, runs it, writes the tensors back.
//
// Call file: int32 extents[6], int32 storages, int32 arguments; per storage int64 bytes and the bytes; per argument
// int64 storage (-1: a scalar) and int64 offset in bytes (or the scalar's 8 bytes).
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

extern "C" const char* emu_launch(const int* extents, void** arguments);

namespace {

FILE* file;

template <class T> T read() {
  T value;
  if (fread(&value, sizeof value, 1, file) != 1) exit(2);
  return value;
}

struct Storage {
  char* data;
  size_t bytes;
};

}  // namespace

int main(int, char** paths) {
  file = fopen(paths[1], "rb");
  if (!file) return 2;
  int extents[6];
  for (int& extent : extents) extent = read<int32_t>();
  std::vector<Storage> storages(read<int32_t>());
  std::vector<int64_t> values(read<int32_t>());
  std::vector<void*> arguments(values.size());
  for (Storage& s : storages) {
    s.bytes = read<int64_t>();
    void* data;
    if (posix_memalign(&data, 256, s.bytes)) return 2;  // each in an allocation of its own, for ASan
    s.data = (char*)data;
    if (fread(s.data, 1, s.bytes, file) != s.bytes) return 2;
  }
  for (size_t i = 0; i < values.size(); i++) {
    int64_t storage = read<int64_t>(), value = read<int64_t>();
    values[i] = storage < 0 ? value : (int64_t)(storages[storage].data + value);
    arguments[i] = &values[i];
  }
  fclose(file);
  const char* message = emu_launch(extents, arguments.data());
  if (message) fprintf(stderr, "EMULATOR: %s\n", message);
  file = fopen(paths[2], "wb");
  if (!file) return 2;
  for (Storage& s : storages) fwrite(s.data, 1, s.bytes, file);
  return fclose(file) ? 2 : 0;
}
